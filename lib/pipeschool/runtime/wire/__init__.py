"""Messages between workers: one interface, a carrier in each file."""
