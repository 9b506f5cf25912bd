"""What a file of rows holds, by its format: where it lies, which parts of it a task reads, its lines, its values."""
