"""Reports the state of a rank: its errors, the line that it is running, and how long it has waited."""
