"""URLs of the documentation."""

from django.urls import path

from webapp.docs import views

urlpatterns = [path("docs/<path:page>", views.docs_page, name="docs")]
urlpatterns += [path("docs/", views.docs_page, {"page": ""}, name="docs-index")]
