"""Who trains, who validates, who tests."""
