"""What every mechanism, projection and data module promises: for the tests, and for a user's own classes."""
