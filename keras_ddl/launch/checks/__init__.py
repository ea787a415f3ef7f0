"""What is looked at on each host before the programs start."""
