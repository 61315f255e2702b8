"""The strategies, one file each; a strategy never imports another one, except the default one's functions."""
