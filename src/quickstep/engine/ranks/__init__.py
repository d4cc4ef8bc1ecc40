"""The processes of a model that several ranks compute: started, opened, watched."""
