"""Many ranks: the result of training does not depend on the layout."""
