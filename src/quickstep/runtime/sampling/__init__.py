"""From logits to tokens: penalties, filters, noise, log-probabilities."""
