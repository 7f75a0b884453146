"""User interfaces besides the command line: the chat page and the server."""
