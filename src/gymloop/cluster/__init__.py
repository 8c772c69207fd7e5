"""Where workers live, Ray actors or objects in this process, and how their failure is noticed."""
