"""The page at `/`: plain HTML, CSS and ES modules, served as they are.  No build step, nothing from another host."""
