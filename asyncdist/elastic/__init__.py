"""Jobs whose members change: `join` a job, and go on when a member is lost or a newcomer waits. Exported by `asyncdist`."""
