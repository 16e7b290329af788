"""From a plan and a machine to command lines and job scripts; run from the checkout."""
