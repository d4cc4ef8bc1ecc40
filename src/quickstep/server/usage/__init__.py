"""What requests cost: prices, the ledger of finished sequences, budgets and rate limits."""
