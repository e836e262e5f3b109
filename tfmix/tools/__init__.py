"""Tools that explain: checks, monitors, hardware, the command line."""
