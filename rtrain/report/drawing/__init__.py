"""HTML and SVG."""
