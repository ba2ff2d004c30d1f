"""Claims of the methods for scheduling and inventory control, one file a paper."""
