"""The rows of a batch file: read as requests, encoded, measured, and written as output lines."""
