"""What a plan costs before it runs."""
