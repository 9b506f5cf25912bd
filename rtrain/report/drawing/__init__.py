"""What the page is drawn with: SVG, charts, the blocks of a section, and the page itself. Knows nothing of runs."""
