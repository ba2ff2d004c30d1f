"""Control: Gymnasium environments, small networks, replay."""
