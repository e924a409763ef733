"""The members of a group: who they are, what they agree on, and how they go on without those that are lost."""
