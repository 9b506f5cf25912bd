"""What a search knows: its trials, its journal, which trial is the better one, and who goes on."""
