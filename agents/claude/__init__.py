"""A language model that writes changes: the connection, the tools, the conversation."""
