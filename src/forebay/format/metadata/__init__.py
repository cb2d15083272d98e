"""What the metadata store holds: its keys, its values, descriptors of history and deletion vectors."""
