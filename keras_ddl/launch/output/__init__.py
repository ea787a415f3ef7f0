"""Shows and filters the ranks' output."""
