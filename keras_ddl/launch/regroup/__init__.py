"""Jobs that continue without lost ranks and accept new ones."""
