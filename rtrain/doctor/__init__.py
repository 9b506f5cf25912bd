"""What a run costs: where its time goes, how it scales, what memory, hours and money it takes."""
