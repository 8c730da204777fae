"""Pure functions and tables of token ids: keys, fingerprints, the chunk index, the analyzer."""
