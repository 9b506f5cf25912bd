"""Networks: built from a folder or a hub name, computed without padding."""
