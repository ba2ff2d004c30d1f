"""Games of two players with hidden cards, small enough to be compiled into a table and solved for exploitability exactly."""
