"""What to draft: how many tokens for each row (`control`), and by which proposer (`choice`)."""
