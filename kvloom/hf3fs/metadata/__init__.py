"""The metadata service of HF3FS: which page of which file holds a key (spec rows H5-H12)."""
