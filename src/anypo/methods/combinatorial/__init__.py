"""Methods for scheduling and inventory control, one file a paper."""
