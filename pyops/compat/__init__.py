"""Other libraries' names and argument orders, on the ops of pyops: change an import, keep the code."""
