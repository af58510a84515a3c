"""Tables and figures, made from results files alone."""
