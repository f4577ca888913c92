"""The web server: HTTP to engine and back.  The only room that may import the web stack."""
