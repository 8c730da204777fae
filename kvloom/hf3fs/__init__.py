"""Pages of KV cache in files on 3FS, found through a metadata service."""
