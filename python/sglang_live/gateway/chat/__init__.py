"""What chats have in common on every route that takes one."""
