"""`pagestream bench`: a running server under load, or the engine in this process, against what the machine could do."""
