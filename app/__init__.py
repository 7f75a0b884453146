"""What people meet besides the command line: the chat page."""
