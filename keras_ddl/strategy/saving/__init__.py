"""What is saved besides variables, and which rank saves it."""
