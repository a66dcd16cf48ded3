"""What hardware a load of talking users needs: placement, flags, memory and cost, by simulation."""
