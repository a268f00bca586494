"""What happens around an action, each in its own file; none knows of another."""
