"""The commands of ``asyncdist bench`` that measure something other than collectives."""
