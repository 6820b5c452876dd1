"""What fits, what it takes, and how good it is: estimated and measured."""
