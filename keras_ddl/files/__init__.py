"""Files that are whole: written so that no reader and no kill sees half of one, and checked."""
