"""From a plan and a machine to command lines and job scripts; installed as tilenet.launch."""
