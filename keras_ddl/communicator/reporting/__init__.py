"""What a rank says about itself: errors, the line it is at, how long it waits."""
