"""How long calls take: what was measured, what the cost model predicts, and on how many ranks the next call runs."""
