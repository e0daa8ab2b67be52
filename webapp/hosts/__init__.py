"""GPU hosts: enrolment, contact, inventory."""
