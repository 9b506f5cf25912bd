"""Named recipes, one commented YAML file each."""
