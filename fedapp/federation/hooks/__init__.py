"""The policies of a run, one class each (`fedapp/federation/hook.py` states what a hook may define)."""
