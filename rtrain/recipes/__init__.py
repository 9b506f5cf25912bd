"""The recipes: one commented YAML file each."""
